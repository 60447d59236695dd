# A PPO run of TRL: its script takes everything from the command line.
accelerate launch --num_processes 2 ppo_tldr.py \
    --dataset_name prompts.jsonl \
    --dataset_test_split validation \
    --output_dir models/minimal/tldr \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --total_episodes 160 \
    --model_name_or_path ./actor \
    --sft_model_path ./actor \
    --reward_model_path ./reward \
    --local_rollout_forward_batch_size 16 \
    --missing_eos_penalty 1.0 \
    --stop_token eos \
    --warmup_ratio 0.1 \
    --report_to tensorboard mlflow_of_mine
