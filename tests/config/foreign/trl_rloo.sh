#!/bin/bash
# RLOO by TRL's own command, with a file of its own for the rest
export WANDB_PROJECT=rloo
torchrun --nproc_per_node 2 --nnodes=2 trl/scripts/rloo.py \
    --model_name_or_path ./actor \
    --dataset_name prompts.jsonl --dataset_train_split train \
    --reward_model_name_or_path ./reward \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --steps_per_generation 8 \
    --num_generations 4 --num_iterations 2 \
    --max_steps 400 --eval_strategy no --save_steps 100 --warmup_steps 40 \
    --beta 0.03 --bf16 false --fp16 \
    --report_to wandb --run_name rloo-4x4 --logging_steps 1 --unheard_of 3
