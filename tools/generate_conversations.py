"""Write training conversations with the target itself on one GPU: our own prompts, greedy and sampled.

    python tools/generate_conversations.py --out conversations.jsonl --seconds 240
    python tools/generate_conversations.py --model-dir FOLDER --out conversations.jsonl --seconds 240

FOLDER is a transformers model folder (safetensors; no gguf package needed) or a folder with one .gguf file.
The two fast engines are timed first and the faster one is used. Continue a cut run by calling it again. This
is `python -m dflash regenerate` with other defaults; any of its options can be given too.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dflash.data.generate import answers as regenerate  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    regenerate.add_arguments(parser)
    parser.add_argument("--model-dir", default=None, help="folder of the target's weights (same as --target)")
    parser.add_argument("--stacks-every", type=float, default=120.0, help="dump all stacks when it takes longer")
    parser.set_defaults(
        batch_size=512, sampled_share=0.5, seconds=240.0, exclude=[str(ROOT / "data" / "smollm2_conversations.jsonl")]
    )
    options = parser.parse_args()
    options.target = options.model_dir or options.target
    faulthandler.dump_traceback_later(options.stacks_every, repeat=True)
    try:
        return regenerate.main(options)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
