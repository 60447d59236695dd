# GRPO with TRL and vLLM in the same processes: the form of its guide
CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch \
    --config_file examples/accelerate_configs/deepspeed_zero3.yaml \
    --num_processes 4 \
    examples/scripts/grpo.py \
    --model_name_or_path ./actor \
    --dataset_name prompts.jsonl \
    --reward_model_name_or_path ./reward \
    --output_dir runs/grpo-vllm \
    --learning_rate 1e-5 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.03 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 2 \
    --num_generations 8 \
    --max_completion_length 2048 \
    --num_train_epochs 1 \
    --beta 0.001 \
    --use_vllm True \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.4 \
    --use_peft \
    --lora_r 32 --lora_alpha 64 \
    --lora_target_modules "q_proj" "v_proj" \
    --save_steps 50 \
    --gradient_checkpointing \
    --dtype bfloat16 \
    --log_completions \
    --push_to_hub
