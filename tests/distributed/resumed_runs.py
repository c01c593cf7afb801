"""A run of a script that is stopped in a later epoch, beside one that is not; the final losses go to a file, as JSON.

torchrun --nproc-per-node 2 resumed_runs.py STEP FOLDER FILE ARGUMENT...
"""

import json
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.train import glue as run_glue


def main() -> None:
    """Run as one of several processes."""
    step, folder, file, *arguments = sys.argv[1:]
    losses = {}
    for order in ("random", "group_by_length"):
        whole, stopped = (Path(folder) / f"{order}-{name}" for name in ("whole", "stopped"))
        run = [*arguments, "--train_sampling_strategy", order, "--resume_from_checkpoint", "last", "--output_dir"]
        unbroken = run_glue.main([*run, str(whole)])
        if dist.get_rank() == 0:
            shutil.copytree(whole / f"checkpoint-{step}", stopped / f"checkpoint-{step}")
        dist.barrier()
        resumed = run_glue.main([*run, str(stopped)])
        losses[order] = (unbroken["eval_loss"], resumed["eval_loss"])
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
