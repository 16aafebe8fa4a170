"""Warnings about histories that a loop omits or cannot change."""

WITHOUT_HISTORIES = (
    "A model with delayed scaling is trained without its 'fp8' collection, so every scale "
    "is computed from the tensor itself: current scaling. Pass all of model.init's result, as "
    "jfp8.TrainState and jfp8.value_and_grad do, with 'fp8' and 'fp8_sink' in variable_axes of "
    "nn.scan and nn.vmap; or choose it explicitly: recipe='current'."
)
UNCHANGED = (  # a warning if the collection is mutable
    "apply returns the collection '_overwrite_with_gradient' unchanged: its gradient is its next "
    "value. A loop that stores the result of apply, such as Kauldron's, records no amax: omit "
    "state_collection there. In others, mutable=flax.core.DenyList('_overwrite_with_gradient')."
)
