"""The Transformers Trainer with a tiny model and random weights."""

import sys

import torch
import torch.distributed as dist
from small_training import flat, report
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

config = BertConfig(
    vocab_size=32,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=8,
    max_position_embeddings=16,
)
torch.manual_seed(0)
bert = BertForSequenceClassification(config)
before = flat(bert)
data = [{"input_ids": torch.arange(8) + row % 4, "labels": row % 2} for row in range(16)]
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    max_steps=2,
    per_device_train_batch_size=2,
    learning_rate=0.1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=bert, args=arguments, train_dataset=data)
trainer.train()
report(
    before,
    flat(bert),
    library=[arguments.process_index, arguments.local_process_index, arguments.world_size],
    elastic=dist.is_torchelastic_launched() and arguments.parallel_mode.value == "distributed",
    steps=trainer.state.global_step,
)
