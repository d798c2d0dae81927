"""A Hugging Face Trainer that is watched, restarted, and stopped in good order.

python examples/huggingface_train.py FOLDER
resilience run --nproc-per-node=2 --max-restarts=3 examples/huggingface_train.py FOLDER
"""

import sys
from pathlib import Path

import torch
from resilience.integrations.huggingface import ResilienceCallback, last_checkpoint
from torch import nn
from transformers import Trainer, TrainingArguments

folder, width = Path(sys.argv[1]), 16


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(inputs)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


if __name__ == "__main__":
    torch.manual_seed(1)
    rows = torch.randn(160, width)
    trainer = Trainer(
        Model(),
        TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            num_train_epochs=6,
            save_steps=5,
            save_total_limit=2,
            logging_steps=5,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"inputs": row, "labels": row.sum(dim=-1, keepdim=True)} for row in rows],
        callbacks=[ResilienceCallback()],  # the one line
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(trainer))
    if trainer.is_world_process_zero():
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), folder / "final.pt")
        print(f"{trainer.state.global_step} steps on {trainer.args.world_size} ranks")
