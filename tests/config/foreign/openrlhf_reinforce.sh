set -x
# REINFORCE++-baseline with OpenRLHF 0.11: a function as the reward, and a mask for the mismatch with vLLM

MODEL=${MODEL:-./actor}
N=8
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path $MODEL \
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 \
   --ref.num_nodes 1 --ref.num_gpus_per_node 8 \
   --vllm.num_engines 8 --vllm.tensor_parallel_size 1 \
   --vllm.enable_sleep --ds.enable_sleep --train.colocate_all \
   --vllm.gpu_memory_utilization 0.6 \
   --reward.remote_url reward_func.py \
   --data.prompt_dataset prompts.jsonl --data.input_key prompt --data.label_key answer \
   --data.max_len 2048 --rollout.max_new_tokens 1024 \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt $N \
   --train.batch_size $((128 * N)) --train.micro_batch_size 4 \
   --train.num_episodes 20 --train.max_epochs 1 \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.init_coef 1e-5 --algo.kl.use_loss --algo.kl.estimator k2 \
   --algo.advantage.is_correction_level token \
   --algo.advantage.is_correction_threshold 0.5 5.0 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --actor.adam.lr 1e-6 --actor.lr_warmup_ratio 0.05 --actor.lr_scheduler constant_with_warmup \
   --actor.gradient_checkpointing_enable \
   --ds.zero_stage 3 --ds.packing_samples --ds.param_dtype bf16 \
   --ckpt.output_dir runs/reinforce --ckpt.save_steps 20 --ckpt.max_num 2 \
   --eval.dataset prompts.jsonl --eval.steps 10 --eval.n_samples_per_prompt 4 \
   --logger.tensorboard_dir runs/tb \
   --train.full_determinism_off 1
