"""Keys of ordinary DeepSpeed files for which there is nothing here, and what becomes of them.

    an old name                                     becomes the new one
    how DeepSpeed writes, buffers or sends          accepted; all of them are one warning
    another kind of training, or other arithmetic   accepted where it is switched off, else refused

By the section that they are in. Source: deepspeed.ai/docs/config-json.
"""

# What the value must be; ranges are those of the config's own keys (config.py).
INERT: dict[str, dict] = {
    "": {
        "wall_clock_breakdown": bool, "dump_state": bool, "memory_breakdown": bool,
        # Averages are the same, whether gradients are divided before they are added up or after it.
        "prescale_gradients": bool, "gradient_predivide_factor": float, "sparse_gradients": bool,
        "disable_allgather": bool, "zero_allow_untested_optimizer": bool, "zero_force_ds_cpu_optimizer": bool,
        "use_data_before_expert_parallelism": bool, "dataloader_drop_last": bool, "use_node_local_storage": bool,
        "tensorboard": dict, "wandb": dict, "csv_monitor": dict, "comet": dict, "comms_logger": dict,
        "flops_profiler": dict, "activation_checkpointing": dict, "checkpoint": dict, "aio": dict, "nebula": dict,
    },
    "optimizer.": {"legacy_fusion": bool},
    # The loss is not scaled in bfloat16, but published files say how, as they were copied from the section fp16.
    "bf16.": {
        "immediate_grad_update": bool, "loss_scale": float, "initial_scale_power": int, "loss_scale_window": int,
        "hysteresis": int, "min_loss_scale": float,
    },
    "zero_optimization.": {
        "contiguous_gradients": bool, "reduce_scatter": bool, "allgather_partitions": bool,
        "allgather_bucket_size": int, "round_robin_gradients": bool, "load_from_fp32_weights": bool,
        "elastic_checkpoint": bool, "ignore_unused_parameters": bool, "legacy_stage1": bool,
        "use_multi_rank_bucket_allreduce": bool, "memory_efficient_linear": bool, "cpu_offload_use_pin_memory": bool,
        "cpu_offload_params": bool, "offload_param": dict, "sub_group_size": int, "max_live_parameters": int,
        "stage3_max_live_parameters": int, "stage3_max_reuse_distance": int, "stage3_prefetch_bucket_size": int,
        "stage3_param_persistence_threshold": int, "stage3_model_persistence_threshold": int,
        "stage3_gather_16bit_weights_on_model_save": bool, "stage3_gather_fp16_weights_on_model_save": bool,
        "stage3_module_granularity_threshold": int, "stage3_use_all_reduce_for_fetch_params": bool,
    },
    "zero_optimization.offload_optimizer.": {
        "pin_memory": bool, "buffer_count": int, "fast_init": bool, "pipeline_read": bool, "pipeline_write": bool,
        "nvme_path": str,
    },
}  # fmt: skip

MUST_BE_OFF = {
    "": (
        "amp", "autotuning", "communication_data_type", "compression_training", "curriculum_learning",
        "data_efficiency", "data_types", "eigenvalue", "elasticity", "fp32_allreduce", "hybrid_engine",
        "progressive_layer_drop", "quantize_training", "sparse_attention", "tensor_parallel", "torch_autocast",
    ),
    "fp16.": ("auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads"),
    "bf16.": ("check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"),
    "zero_optimization.": (
        "zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zenflow",
    ),
}  # fmt: skip


def is_off(value: object) -> bool:
    """Whether a key asks for nothing: ``false``, ``null``, a section with ``"enabled": false`` or without values."""
    if isinstance(value, dict):
        return not value.get("enabled", any(not is_off(entry) for entry in value.values()))
    return value is None or value is False
