"""vLLM's parser of a command line."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads --max_num_seqs as --max-num-seqs, as vLLM's does."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: object = None) -> Any:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        dashed = [re.sub(r"^--[^=]+", lambda option: option[0].replace("_", "-"), one) for one in given]
        return super().parse_known_args(dashed, namespace)
