"""The tests of Keras that need an absent library, and the tests that cannot pass here, each with its reason."""

ABSENT = {
    "tensorboard_test": "reads event files by TensorFlow",
    "orbax_checkpoint_test": "needs Orbax",
    "trainer_test::test_stop_loop_fit": "x is a generator without an end, which a run reads before its first step",
    **{
        f"trainer_test::{name}": "needs TensorFlow"
        for name in (
            "test_fit_with_data_adapter_tf_dataset",
            "test_fit_with_data_adapter_tf_dataset_infinite",
            "test_predict_preserve_order_1_eager",
            "test_predict_preserve_order_1_jit",
            "test_predict_preserve_order_1_non_jit",
        )
    },
    **{
        f"trainer_test::test_fit_with_data_adapter_grain_{name}": "needs grain"
        for name in ("dataloader", "dataset", "dataset_with_len")
    },
}
"""Files and tests that need a library that is not installed, or do not end."""

FAILURES = {
    "trainer_test::test_callbacks_can_update_state_at_batch_boundary": (
        "a callback changes a weight between two steps, which workers would not do alike"
    ),
    **{
        f"trainer_test::test_steps_per_epoch_not_match_too_low_{mode}": (
            "epochs of 9 and 1 steps, as rows are left; epochs of a run have equal numbers of steps"
        )
        for mode in ("eager", "non_jit", "jit")
    },
    "backup_and_restore_test::test_backup_corrupted": "a continued run with fewer epochs than it began with",
    "backup_and_restore_test::test_best_case_epoch": "a continued run with fewer epochs than it began with",
    "backup_and_restore_test::test_best_case_step": "counts repeated steps of an interrupted epoch",
    "swap_ema_weights_test::test_swap_ema_weights_on_epoch": "swap_on_epoch=True is refused",
    "swap_ema_weights_test::test_swap_ema_weights_with_invalid_optimizer": "a ConfigError, not a ValueError",
}
"""Tests that must fail here."""

WITH_WORKER = (
    "trainer_test::test_fit_flow_graph_fn",
    "trainer_test::test_loss_weights",
    "trainer_test::test_nested_inputs",
    "trainer_test::test_internal_only_loss",
    "trainer_test::test_constraints_are_applied",
    "terminate_on_nan_test::test_normal_training_does_not_raise_raise_error_false",
)
"""Tests that run with a worker, too."""
