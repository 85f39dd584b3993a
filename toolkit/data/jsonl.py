"""The readers and the writer of `toolkit.jsonl`, under the name that data/ and training know them by."""

from toolkit.jsonl import DataError, RowAppender, cut_torn_line, parse_row, read_rows

__all__ = ["DataError", "RowAppender", "cut_torn_line", "parse_row", "read_rows"]
