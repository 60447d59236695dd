"""A GRPO run of TRL, as its guide has it."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def short(completions, **kwargs):
    return [-float(len(each)) for each in completions]


GROUP = 4
dataset = load_dataset("someone/prompts", split="train")
dataset = dataset.map(lambda row: {"prompt": row["question"]})
args = GRPOConfig(
    output_dir="out/grpo",
    learning_rate=2e-6,
    num_generations=GROUP,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    steps_per_generation=4,
    max_steps=40,
    max_completion_length=12,
    loss_type="dr_grpo",
    scale_rewards=False,
    beta=0.04,
    max_grad_norm=max(1.0, 0.5),
    chat_template_kwargs={"enable_thinking": False},
    reward_weights=[1.0, 0.5],
)
trainer = GRPOTrainer(
    model="./actor",
    reward_funcs=[short, "./reward"],
    args=args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=2, lora_alpha=4, lora_dropout=0.05, target_modules=["q_proj"]),
)
trainer.train()
