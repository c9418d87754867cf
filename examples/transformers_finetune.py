"""A Transformers model fine-tuned by its Trainer, with DDP, under meshrun.

    meshrun --mesh dp=2 examples/transformers_finetune.py

The model is tiny and starts from random weights, so nothing is downloaded; it learns whether a
sequence begins with a small number. For a real model, use ``from_pretrained()`` and your data. On
GPUs, leave ``use_cpu=True`` out, and set ``bf16=True`` if they support it.
"""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    """Train for 40 steps and print the loss from one rank."""
    torch.manual_seed(0)  # the same weights and data on every rank
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
    )
    texts = torch.randint(32, (1024, 9))
    labels = (texts[:, 0] < 16).long()
    data = [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=40,
            per_device_train_batch_size=16,
            learning_rate=0.02,
            lr_scheduler_type="constant",
            logging_steps=10,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        model = BertForSequenceClassification(config)
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)  # the loss is printed below
        trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']:2d}  loss {float(entry['loss']):.3f}")


if __name__ == "__main__":
    main()
