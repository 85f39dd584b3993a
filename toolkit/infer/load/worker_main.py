"""`python -m toolkit.infer.load.worker_main`: a worker process, started by the driver, with messages on its stdin."""

from __future__ import annotations

import os

import torch.distributed as dist

from toolkit.infer.load.config import EngineConfig
from toolkit.infer.load.load_engine import load_rank
from toolkit.infer.parallel.rank_engine import Worker, run_worker
from toolkit.log import get_logger

logger = get_logger(__name__)


def main() -> None:
    """Run until the driver stops this rank. The exit status is 1 after an error."""
    worker = Worker()
    try:
        assert isinstance(worker.config, EngineConfig), f"the driver sent a {type(worker.config).__name__}"
        run_worker(load_rank(worker.config, worker).engine, worker.next_message)
    except BaseException as error:  # process edge: the driver must detect every error
        if not worker.stopping():
            logger.error("rank %d failed: %s: %s", worker.rank, type(error).__name__, error, exc_info=error)
        os._exit(1)  # a normal exit would wait for the other ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
