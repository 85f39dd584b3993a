"""The table of metrics in docs/serving.md: from toolkit/infer/server/metric_series.py."""

from __future__ import annotations

from tables import code, plain, table

from toolkit.infer.server.metric_series import PREFIX, SERIES


def block() -> str:
    rows = []
    for name, one in SERIES.items():
        label = f"{{{one.label}}}" if one.label else ""
        rows.append((code(f"{PREFIX}{name}{label}"), one.kind, plain(one.text), ", ".join(map(code, one.like))))
    return table(("metric", "kind", "meaning", "equivalent"), rows)
