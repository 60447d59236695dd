#!/bin/bash
# GRPO with OpenRLHF and DAPO's dynamic filtering, two data sets by their shares
python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain ./actor \
   --reward_pretrain ./reward \
   --advantage_estimator group_norm \
   --dynamic_filtering --dynamic_filtering_reward_range 0 1 \
   --n_samples_per_prompt 8 --rollout_batch_size 128 --train_batch_size 256 \
   --micro_train_batch_size 1 --micro_rollout_batch_size 2 \
   --num_episodes 1 --max_epochs 2 --freezing_actor_steps 0 \
   --prompt_data prompts.jsonl,prompts.jsonl --prompt_data_probs 0.75,0.25 --input_key prompt \
   --prompt_max_len 512 --generate_max_len 1024 --temperature 0.9 --top_p 0.95 \
   --eps_clip_low_high 0.2 0.28 \
   --init_kl_coef 0 \
   --overlong_buffer_len 256 --overlong_penalty_factor 1.0 \
   --actor_learning_rate 1e-6 --lr_warmup_ratio 0.03 --lr_scheduler cosine \
   --lora_rank 16 --lora_alpha 32 \
   --use_tensorboard logs \
   --seed 7 \
   --save_steps -1
