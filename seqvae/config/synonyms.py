"""What other tools call our settings: Lightning, Hugging Face's Trainer, NeMo, mmcv, nanoGPT, scvi, and the scripts of many papers.

In: a word that is no setting here. Out: what to write in its place. A word may stand behind several answers: the first one whose
flags a command has is the one for that command.
"""

ANSWERS = {
    # Data
    "--data_dir": (
        "data data_path data_root data_file dataset dataset_dir dataset_path dataset_name train_file train_data train_path "
        "train_dir input input_dir input_path input_file root parquet parquet_path"
    ),
    "--kind": "data_type modality input_type",
    "--split": "eval_split subset",
    "--sequence_column": "sequence_col seq_column text_column text_col token_column input_column",
    "--id_column": "id_col group_column key_column subject_column patient_column patient_id_column",
    "--time_column": "time_col timestamp_column date_column",
    "--variable_column": "variable_col code_column code_col",
    "--value_column": "value_col",
    "--feature_columns": "features feature_cols columns input_columns",
    "--tokenizer": "tokenizer_name tokenizer_path tokenizer_file tokenizer_type",
    "--minimum_count": "min_count min_freq min_frequency vocab_min_freq",
    "--vocabulary_size": "vocab_size vocab n_vocab num_embeddings num_tokens",
    "--validation_fraction": (
        "val_split valid_split validation_split dev_split val_ratio valid_ratio validation_ratio val_fraction valid_fraction "
        "val_frac val_size"
    ),
    "--test_fraction": "test_split test_ratio test_frac test_size",
    "--label_path": "label_file labels_file labels_path",
    "--label_column": "label labels label_col target target_column",
    "--probe": "label labels label_col label_column target target_column",
    "--params_map_path": "stats_path norm_stats scaler_path",
    "--max_sequence_length": (
        "seq_len seq_length sequence_length max_seq_len max_seq_length max_len max_length model_max_length context_length "
        "context_size block_size n_ctx max_position_embeddings"
    ),
    "--window_stride": "stride doc_stride",
    "--long_sequences truncate": "truncate truncation",
    "--cache_data (in memory), --cache_dir (on disk)": (
        "cache use_cache cache_dataset cache_in_memory keep_in_memory in_memory preload"
    ),
    "--cache_dir": "cache cache_path cache_folder cache_root",
    # Batches
    "--batch_size": (
        "bs batch per_device_train_batch_size per_gpu_train_batch_size per_gpu_batch_size batch_size_per_gpu train_batch_size "
        "micro_batch_size micro_batch samples_per_gpu device_train_microbatch_size"
    ),
    "--batch_size, --gradient_accumulation_steps": (
        "global_batch_size total_batch_size effective_batch_size global_train_batch_size"
    ),
    "--tokens_per_batch": "max_tokens max_tokens_per_batch max_batch_tokens batch_tokens tokens_per_gpu token_budget",
    "--bucketing": "bucket bucket_by_length bucket_sampler group_by_length length_grouped_sampling",
    "--use_dynamic_padding": "dynamic_padding",
    "--use_dynamic_padding false": "pad_to_max_length static_padding",
    "--drop_last": "dataloader_drop_last drop_remainder",
    "--pad_grid (how many shapes)": "pad_to_multiple_of",
    "--num_workers": (
        "workers n_workers nworkers data_workers num_data_workers loader_workers dataloader_num_workers workers_per_gpu "
        "preprocessing_num_workers num_proc"
    ),
    "--prefetch_factor": "prefetch prefetch_batches dataloader_prefetch_factor",
    "--persistent_workers": "dataloader_persistent_workers",
    "--pin_memory": "pin pin_mem dataloader_pin_memory",
    "--loader_timeout_seconds": "timeout dataloader_timeout",
    # Model
    "--encoder, --decoder": "model model_type architecture arch backbone net network rnn_type cell_type",
    "--encoder": "encoder_type encoder_arch",
    "--decoder": "decoder_type decoder_arch",
    "--width": (
        "d_model model_dim dim hidden hidden_size hidden_dim hidden_units hidden_channels d_hidden n_hid nhid n_hidden rnn_size "
        "n_embd embed_dim embedding_dim embedding_size emb_dim emb_size"
    ),
    "--depth": (
        "layers num_layers n_layers n_layer nlayers num_hidden_layers num_blocks n_blocks encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers"
    ),
    "--heads": "num_heads n_heads n_head nhead num_attention_heads attention_heads",
    "--latent_size": "latent_dim latent_dims n_latent z_dim zdim dim_z z_size nz latent_channels bottleneck_size",
    "--pooling": "pool pool_type pooling_type pooling_mode encoder_pooling pooler",
    "--dropout": "dropout_rate dropout_prob dropout_p drop_rate hidden_dropout_prob attention_dropout attn_dropout",
    "--word_dropout": "word_drop word_dropout_rate token_dropout",
    "--posterior batch_norm": "bn_vae bnvae use_bn_vae batch_norm",
    # Objective
    "--beta": "kl_weight kld_weight kl_coef kl_coeff kl_beta beta_kl beta_max max_beta kl_lambda lambda_kl kl_scale",
    "--kl_schedule": "kl_anneal kl_annealing anneal annealing anneal_function kl_anneal_function beta_schedule",
    "--kl_schedule cyclical": "cyclical cyclical_annealing cyclic_annealing",
    "--kl_warmup (optimizer steps, or a fraction of the run)": (
        "kl_warmup_steps kl_warmup_epochs kl_anneal_steps kl_annealing_steps kl_annealing_epochs beta_warmup beta_warmup_steps "
        "anneal_steps annealing_steps n_epochs_kl_warmup n_steps_kl_warmup"
    ),
    "--kl_cycle (its length)": "cycles n_cycles num_cycles kl_cycles",
    "--free_bits": "free_nats kl_floor kl_min min_kl kl_threshold lambda_free_bits",
    "--free_bits_by dimension|group|total": "free_bits_mode free_bits_type free_bits_scope fb fb_mode free_bits_per",
    "--target_kl": "target_rate kl_target capacity kl_capacity max_capacity",
    "--aggressive_encoder": "aggressive aggressive_training lagging lagging_encoder",
    "--pretrain_autoencoder (optimizer steps)": "ae_pretrain pretrain_ae ae_steps pretrain_steps pretrain_epochs",
    "--contrastive_weight": "contrastive_loss_weight infonce_weight nce_weight mi_weight mutual_information_weight critic_weight",
    "--label_weight": "classification_weight cls_weight aux_weight label_loss_weight",
    # Optimizer
    "--lr": "learning_rate max_learning_rate max_lr peak_lr base_lr init_lr",
    "--optimizer": "optim optimiser opt optim_name optimizer_name optimizer_type",
    "--ema (its decay)": "ema_decay use_ema weight_ema ema_rate model_ema polyak swa average_weights",
    "--scale_lr": "auto_scale_lr scale_learning_rate lr_scaling",
    "--lr_schedule": "lr_scheduler lr_scheduler_type lr_policy lr_decay lr_decay_style scheduler sched schedule",
    "--warmup (optimizer steps, or a fraction of the run)": (
        "warmup_steps num_warmup_steps warmup_ratio warmup_proportion warmup_epochs warmup_iters lr_warmup lr_warmup_steps "
        "lr_warmup_iters"
    ),
    "--weight_decay": "wd l2 weight_decay_rate adam_weight_decay",
    "--gradient_clip": (
        "gradient_clip_val gradient_clip_norm gradient_clipping grad_clip grad_clip_norm grad_norm_clip clip clip_norm "
        "clip_value clip_grad clip_grad_norm max_grad_norm"
    ),
    "--gradient_accumulation_steps": (
        "accumulate accumulate_grad_batches accumulation_steps gradient_accumulation gradient_accumulate_every grad_accum "
        "grad_accum_steps grad_accumulation_steps grad_acc_steps accum_steps accum_iter accumulative_counts update_freq"
    ),
    "--fused_optimizer": "fused fused_adam use_fused",
    # Compute
    "--precision 32-true": "fp32 float32 full_precision no_amp no_fp16",
    "--precision 16-mixed": (
        "fp16 float16 half use_fp16 use_half amp use_amp autocast mixed_precision use_mixed_precision"
    ),
    "--precision bf16-mixed": (
        "bf16 bfloat16 use_bf16 fp16 float16 half use_fp16 use_half amp use_amp autocast mixed_precision use_mixed_precision"
    ),
    "--precision": "dtype torch_dtype",
    "--accelerator": "device platform",
    "--accelerator cpu": "cpu use_cpu no_cuda",
    "--accelerator gpu": "cuda use_cuda use_gpu",
    "--accelerator mps": "mps use_mps use_mps_device",
    "--devices (how many; CUDA_VISIBLE_DEVICES says which)": (
        "gpu gpus gpu_id gpu_ids num_gpus n_gpu n_gpus ngpu ngpus gpus_per_node num_devices n_devices device_ids devices_per_node "
        "nproc_per_node num_processes world_size"
    ),
    "--num_nodes": "nodes nnodes n_nodes",
    "--strategy": "ddp use_ddp fsdp deepspeed distributed distributed_backend distributed_strategy dist_backend",
    "--sync_batchnorm": "sync_bn syncbn use_sync_bn",
    "--compile_model": "compile use_compile torch_compile use_torch_compile",
    "--compile_mode": "torch_compile_mode",
    "--gradient_checkpointing": (
        "activation_checkpoint activation_checkpointing checkpoint_activations grad_checkpoint grad_checkpointing "
        "use_checkpoint use_gradient_checkpointing"
    ),
    "--cudnn_benchmark": "benchmark",
    "--deterministic": "full_determinism use_deterministic_algorithms",
    "--detect_anomaly": "anomaly anomaly_detection autograd_anomaly",
    # Validation, checkpoints, monitoring
    "--val_check_interval (a fraction of an epoch, or a whole number of optimizer steps)": (
        "val_interval valid_interval validation_interval eval_interval eval_steps eval_every eval_every_n_steps eval_freq "
        "eval_strategy evaluation_strategy val_every val_every_n_steps val_freq validate_every check_val_every_n_epoch"
    ),
    "--limit_val_batches": "val_batches num_val_batches max_val_batches eval_batches eval_iters max_eval_samples",
    "--sanity_checks": "num_sanity_val_steps sanity_val_steps",
    "--early_stopping_patience (how many validations)": "patience early_stop early_stopping early_stop_patience es_patience",
    "--checkpoint_every_n_steps": (
        "save_steps save_every save_every_n_steps save_interval save_freq save_frequency save_strategy checkpoint_every "
        "checkpoint_freq checkpoint_interval ckpt_interval every_n_train_steps"
    ),
    "--disable_metrics_monitoring": "disable_monitoring no_monitor no_monitoring",
    "--monitor_every_n_steps": "monitor_every monitor_interval metrics_every",
    "--plot_every_n_steps": "plot_every plot_interval",
    # Run
    "--max_epochs": "epoch epochs num_epochs n_epochs nepochs max_epoch max_num_epochs num_train_epochs train_epochs total_epochs",
    "--find_batch": "auto_scale_batch_size auto_find_batch_size find_batch_size",
    "--num_iterations": "steps num_steps iters iterations",
    "--max_steps": (
        "steps n_steps num_steps total_steps train_steps training_steps max_train_steps num_training_steps max_iter max_iters "
        "iters iterations num_iterations train_iters"
    ),
    "--max_epochs 10, --max_steps 1000 or --max_time 1:00:00": "duration max_duration budget",
    "--max_time (hours:minutes:seconds)": "time_limit max_hours max_minutes walltime",
    "--fast_dev_run": "dry_run smoke_test test_run dev_run",
    "--preset debug": "debug",
    "--seed": "random_seed rng_seed manual_seed global_seed random_state seed_everything",
    "--output_dir": (
        "out out_dir outdir output output_path save_dir save_path save_to work_dir default_root_dir exp_dir experiment_dir run_dir "
        "results_dir checkpoint_dir ckpt_dir"
    ),
    "--run_name": "name exp exp_name experiment experiment_name job_name run_id",
    "--resume (auto, or the path of a checkpoint)": (
        "checkpoint checkpoint_path ckpt ckpt_path resume_path resume_from resume_ckpt resume_from_checkpoint resume_from_ckpt "
        "resume_training continue_from auto_resume restore"
    ),
    "--init_from": (
        "load_from load_checkpoint load_weights weights init_checkpoint pretrained pretrained_model pretrained_path finetune_from "
        "from_pretrained model_name_or_path model_path"
    ),
    "--log_every_n_steps": (
        "log_every log_interval log_freq log_frequency log_steps logging_steps logging_interval print_every print_freq "
        "print_interval report_every"
    ),
    "--logger": "loggers report_to tracker log_with",
    "--logger wandb": "wandb use_wandb",
    "--logger tensorboard": "tensorboard use_tensorboard tb",
    "--logger mlflow": "mlflow use_mlflow",
    "--log_dir": "logdir log_path logging_dir tb_dir tensorboard_dir wandb_dir",
    "--config": "config_file config_path config_name cfg cfg_file conf yaml",
    # A trained model
    "--iw_samples": "importance_samples num_importance_samples iwae_samples samples num_samples n_samples",
    "--count": "samples num_samples n_samples num_sequences number num",
    "--length": "seq_len seq_length sequence_length max_len max_length max_new_tokens",
    "--draws": "samples num_samples n_samples num_imputations",
    "--temperature": "temp sampling_temperature",
    "--steps": "num_steps n_steps points num_points",
    "--json": "out out_file output output_file output_path save_path",
    "--output": "out out_dir out_file outfile output_dir output_file output_path save_dir save_path save_to",
    "--plot_path": "out out_file output output_file output_path figure_path plot_file save_path",
    # What needs no flag
    "leave it out: a figure is drawn only where --plot_path says where": "plot no_plot",
    "leave it out: training data are shuffled in each epoch": "shuffle shuffle_data",
    "leave it out: data are converted once and then mapped from disk": "use_optimized_dataset optimized_dataset use_mmap",
    "leave it out: validation batches follow the flags of training batches": (
        "eval_batch_size val_batch_size valid_batch_size per_device_eval_batch_size per_gpu_eval_batch_size"
    ),
    "leave it out: feed-forward layers are four times as wide as the others": (
        "d_ff ffn_dim ff_dim dim_feedforward intermediate_size"
    ),
    "leave it out: torchrun sets it": "local_rank rank master_addr master_port",
    "leave it out: seqvae profile finds the largest batch that fits": (
        "auto_scale_batch_size auto_find_batch_size find_batch_size"
    ),
}
"""What to write, and the words that it answers; behind a flag may stand its value, in parentheses what its value means."""


def answers_to(word: str) -> tuple[str, ...]:
    """Return what could be written in place of a word of another tool, the likeliest first.

    >>> answers_to("epochs"), answers_to("xyzzy")
    (('--max_epochs',), ())
    """
    return tuple(answer for answer, words in ANSWERS.items() if word in words.split())
