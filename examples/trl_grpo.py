"""TRL's GRPOTrainer in server mode, with a whole fleet behind its one URL.

    python examples/trl_grpo.py --model MODEL --url http://gateway:8000

TRL is unmodified and knows nothing of a gateway. It moves weights by NCCL, so it needs a GPU.
"""

from typing import Any

import torch
from common import arguments
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: Any) -> list[float]:
    """The more digits, the better."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def main() -> None:
    """Train for a few steps; every step's weights reach every replica."""
    args = arguments(str(__doc__).splitlines()[0], backends=("nccl",))
    prompts = [f"{a} and {b} make" for a in range(8) for b in range(8)]
    config = GRPOConfig(
        output_dir="trl-grpo",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=args.url,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    trainer.train()
    steps = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"{trainer.state.global_step} steps, reward by step: {steps}")


if __name__ == "__main__":
    main()
