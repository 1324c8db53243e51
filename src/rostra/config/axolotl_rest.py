"""Axolotl's keys that are not translated: those that Rostra can do without, and those that it
has nothing for, by reason."""

from __future__ import annotations

from rostra.config.axolotl_answers import Groups

LOSS = "the loss is computed in chunks that never hold all logits (train.loss_chunk)"
TRACK = "TensorBoard's files and events.jsonl are written, and no tracker is called"
KERNEL = "a kernel: the result is the same, and train.compile fuses what it can"


NEEDLESS: Groups = (
    (
        LOSS,
        "cut_cross_entropy liger_cross_entropy liger_fused_linear_cross_entropy "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks flash_attn_cross_entropy",
    ),
    (
        KERNEL,
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu "
        "liger_glu_activation liger_kernel_impl flash_attn_fuse_mlp flash_attn_rms_norm "
        "flash_optimum flash_attn_d512 fused_attn_kernel large_head_attention sdpa_varlen "
        "gemma4_hybrid_attn_impl lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel use_kernels flex_attn_compile_kwargs experts_implementation "
        "expert_backend use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels "
        "moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast dsv4_fp8_lora_kernel "
        "dsv4_shared_mlp_lora_kernel llama4_linearized_experts",
    ),
    (
        TRACK,
        "use_wandb wandb_name wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch "
        "wandb_log_model use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
        "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
        "comet_experiment_key comet_mode comet_online comet_experiment_config use_trackio "
        "trackio_project_name trackio_run_name trackio_space_id use_swanlab swanlab_project "
        "swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace "
        "swanlab_api_key swanlab_log_model swanlab_web_host swanlab_api_host "
        "swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions "
        "swanlab_completion_log_interval swanlab_completion_max_buffer use_otel_metrics "
        "otel_metrics_host otel_metrics_port",
    ),
    (
        "products in float32 keep PyTorch's precision; most are in precision.compute anyway",
        "tf32",
    ),
    (
        "padding counts nowhere, in loss or speed",
        "pad_to_sequence_len pad_to_multiple_of",
    ),
    (
        "packing looks at all examples, and attention never crosses them",
        "batch_flattening eval_sample_packing sample_packing_group_size sample_packing_bin_size "
        "sample_packing_eff_est sample_packing_mp_start_method "
        "sample_packing_seq_len_multiplier multipack_real_batches "
        "pretrain_multipack_buffer_size streaming_multipack_buffer_size",
    ),
    (
        "shards are read as they are needed, by as many workers as are of use",
        "streaming dataset_processes dataset_num_proc dataset_keep_in_memory "
        "dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor "
        "num_dataset_shards_to_save skip_prepare_dataset is_preprocess preprocess_iterable "
        "remove_unused_columns shuffle_before_merging_datasets",
    ),
    (
        "a run that was begun goes on by itself",
        "auto_resume_from_checkpoints",
    ),
    (
        "evaluation takes micro batches of its own",
        "eval_batch_size",
    ),
    (
        "no step is dropped: the last one of an epoch takes from the next",
        "dataloader_drop_last",
    ),
    (
        "ranks are started by Rostra, torchrun or Slurm, and gradients are summed exactly",
        "ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters "
        "world_size local_rank accelerator_config heads_k_stride ring_attn_func ray_run_name "
        "ray_num_workers resources_per_worker",
    ),
    (
        "the layout says where weights lie, and each rank reads what it holds",
        "device device_map low_cpu_mem_usage max_memory gpu_memory_limit "
        "experimental_skip_move_to_device lora_on_cpu qlora_sharded_model_loading "
        "torchdistx_path",
    ),
    (
        "tokenizers and models tell what they are",
        "tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files "
        "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model lora_fan_in_fan_out",
    ),
    (
        "embeddings grow by what tokens are added",
        "resize_token_embeddings_to_32x",
    ),
    (
        "adapters are float32, embeddings as they come",
        "embeddings_skip_upcast peft_autocast_adapter_dtype fp32_norms fp32_norm_classes",
    ),
    (
        "the template tells where a turn ends, and that is trained",
        "eot_tokens",
    ),
    (
        "recomputing has one way here",
        "gradient_checkpointing_kwargs",
    ),
    (
        "one engine stands for both versions of FSDP",
        "fsdp_version fsdp_final_state_dict_type fp8_enable_fsdp_float8_all_gather",
    ),
    (
        "trades time for memory, with the same result: memory.activation_checkpointing does",
        "tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp torch_empty_cache_steps "
        "gc_steps gc_collect_steps",
    ),
    (
        "checkpoints hold all that a run needs to go on, and one is saved on a stop",
        "save_first_step save_only_model dynamic_checkpoint",
    ),
    (
        "steps that are no numbers stop a run (stability.bad_steps)",
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
    (
        "goes with a key that is refused where it is on",
        "eval_causal_lm_metrics bench_dataset bench_split num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
        "generation_prompt_ratio generation_do_sample eval_table_size eval_max_new_tokens "
        "hub_strategy hub_revision metric_for_best_model greater_is_better eaft_alpha eaft_k "
        "scaling_softmax_factor scaling_softmax_bias relora_prune_ratio relora_prune_method "
        "relora_cpu_offload lisa_step_interval lisa_layers_attribute gptq_groupsize "
        "gptq_model_v1 gptq_disable_exllama spectrum_model_name "
        "model_quantization_config_kwargs nvfp4_merge_aware_start_step",
    ),
    (
        "speed is always shown",
        "include_tokens_per_second include_tkps",
    ),
    (
        "Axolotl's own, while it runs",
        "strict total_num_tokens total_supervised_tokens axolotl_config_path debug test_value",
    ),
    (
        "`rostra merge RUN` merges",
        "merge_lora merge_method",
    ),
    (
        "`rostra generate RUN` tries a model",
        "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
        "gradio_temperature",
    ),
    (
        "the hub's own login is used",
        "hf_use_auth_token",
    ),
)

_REWARD = "no training on preferences or rewards (rl); tune on examples"
_IMAGE = "no images, sound or other modes: text alone"
_ONE_RATE = "all parameters but muon's matrices share one learning rate; remove it"
_FREEZE = "all parameters are trained, or an adapter's; use adapter: lora"
_FORMAT = "weights of this kind are not trained here; set load_in_4bit or load_in_8bit"
_PLUGIN = "a plugin's own way of training; remove it"
REFUSED: Groups = (
    (
        _REWARD,
        "rl trl vllm ebft reward_model process_reward_model center_rewards_coefficient "
        "num_labels dpo_beta dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs "
        "dpo_use_liger_kernel dpo_padding_free dpo_loss_type dpo_loss_weights "
        "dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha orpo_alpha "
        "simpo_gamma cpo_alpha rl_beta kto_desirable_weight kto_undesirable_weight "
        "max_prompt_len",
    ),
    (
        _IMAGE,
        "processor_type processor_kwargs image_size image_resize_algorithm role_boundaries "
        "freeze_mm_modules",
    ),
    (
        _ONE_RATE,
        "embedding_lr embedding_lr_scale lr_groups optim_args optim_target_modules "
        "adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction "
        "dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap qgalore_scale "
        "qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size "
        "qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size",
    ),
    (
        _FREEZE,
        "unfrozen_parameters lisa_n_layers relora jagged_restart_steps "
        "jagged_restart_warmup_steps jagged_restart_anneal_steps spectrum_top_fraction mora",
    ),
    (
        _FORMAT,
        "gptq model_quantization_config use_onebitllms qat quantization quantize_moe_experts "
        "nvfp4_merge_aware nonexpert_quantization dsv4_fp8_nonexpert_mode dsv4_bf16_all "
        "dsv4_fp4_grouped_mode gemma4_fp8_nonexpert gemma4_nf4_nonexpert llmcompressor "
        "fp8_config",
    ),
    (
        _PLUGIN,
        "dense_mixer diffusion grokfast_alpha grokfast_lamb hatchery kd_trainer kd_ce_alpha "
        "kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url "
        "kd_online_topk kd_online_server kd_online_timeout kd_temperature_min lm_eval_tasks "
        "lm_eval_batch_size lm_eval_post_train lm_eval_model nemo_gym_enabled nemo_gym_dir "
        "nemo_gym_auto_clone nemo_gym_config_paths nemo_gym_head_port nemo_gym_server_timeout "
        "nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_datasets nemo_gym_auto_start "
        "nemo_gym_model_name nemo_gym_multi_turn nemo_gym_max_turns trainer_cls",
    ),
    (
        "Rostra runs no code from a model's folder",
        "trust_remote_code tokenizer_use_mistral_common",
    ),
    (
        "the newest version is read; download the one you mean, and name its folder",
        "model_revision",
    ),
    (
        "a model is as its own config says; change that in a copy of its folder",
        "model_config model_kwargs cls_model_config rope_scaling scaling_softmax s2_attention",
    ),
    (
        "random weights have model.architecture or model.preset in Rostra's config",
        "reinit_weights",
    ),
    (
        "rows of added tokens begin at the mean of the others",
        "fix_untrained_tokens mean_resizing_embeddings shrink_embeddings added_tokens_overrides",
    ),
    (
        "adapters here know rank, alpha, dropout, targets, rslora and dora; remove it",
        "lora_target_parameters lora_rank_pattern lora_alpha_pattern peft_layers_to_transform "
        "peft_layers_pattern peft peft_layer_replication peft_trainable_token_indices "
        "peft_ensure_weight_tying",
    ),
    (
        "cosine falls from the warm-up to the end; lr_scheduler: warmup_stable_decay holds a rate",
        "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor",
    ),
    (
        "the rate's end is a share of its peak: write cosine_min_lr_ratio",
        "eta_min",
    ),
    (
        "say it to Rostra: train.micro_batch_size: auto",
        "auto_find_batch_size",
    ),
    (
        "held out are examples of the training data (val_set_size), not others",
        "test_datasets",
    ),
    (
        "the last checkpoints are kept, not the best; remove it",
        "load_best_model_at_end early_stopping_patience",
    ),
    (
        "evaluation measures the loss; remove it",
        "do_causal_lm_eval do_bench_eval",
    ),
    (
        "evaluate.prompt samples text in Rostra's config",
        "generate_samples",
    ),
    (
        "goes on by itself in its own folder; `rostra train --from RUN` starts from another run's",
        "resume_from_checkpoint",
    ),
    (
        "nothing is uploaded; upload the run's `model` or `adapter` folder yourself",
        "hub_model_id push_dataset_to_hub",
    ),
    (
        "a dataset is read whole; write its share to a file, and name that",
        "dataset_shard_num dataset_shard_idx dataset_exact_deduplication min_sample_len",
    ),
    (
        "examples are shuffled and packed by run.seed; remove it",
        "curriculum_sampling sample_packing_sequentially pretraining_sample_concatenation "
        "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks "
        "max_packed_sequence_len",
    ),
    (
        "templates take a conversation alone; write it into the template",
        "chat_template_kwargs default_system_message",
    ),
    (
        "the loss is the mean over target tokens; remove it",
        "use_eaft liger_use_token_scaling",
    ),
    (
        "experts are split with their layers; use fsdp_config",
        "expert_parallel_size expert_parallel_backend expert_parallel_num_nvl_bytes "
        "expert_parallel_num_rdma_bytes expert_parallel_token_capacity "
        "expert_parallel_fallback_on_unsupported",
    ),
    (
        "memory.offload moves parameters to the host; use fsdp_config.offload_params",
        "layer_offloading ple_cpu_offload",
    ),
    (
        "train.compile takes no options; remove it",
        "torch_compile_options deepcompile",
    ),
    (
        "runs are started by `rostra train`, torchrun or Slurm; remove it",
        "use_ray",
    ),
    (
        "no profile is written; remove it",
        "profiler_steps profiler_steps_start",
    ),
    (
        "what files a model has is its own affair; remove it",
        "base_model_ignore_patterns",
    ),
)
