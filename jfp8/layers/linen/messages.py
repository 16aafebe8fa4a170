"""Warnings about histories that a loop omits or cannot change."""

NOT_MUTABLE_INSIDE = (
    "An FP8 matmul records no amax: the 'fp8' collection is mutable in this apply, but not inside "
    "the transformation that calls it. Name it there, next to 'params'; or train with "
    "jfp8.TrainState and jfp8.value_and_grad."
)
WITHOUT_HISTORIES = (
    "A model with delayed scaling is trained without its 'fp8' collection, so every scale "
    "is computed from the tensor itself: current scaling. Pass all of model.init's result, as "
    "jfp8.TrainState and jfp8.value_and_grad do, or choose it explicitly: recipe='current'."
)
UNCHANGED = (  # a warning if the collection is mutable
    "apply returns the collection '_overwrite_with_gradient' unchanged: its gradient is its next "
    "value. A loop that stores the result of apply, such as Kauldron's, records no amax: omit "
    "state_collection there. In others, mutable=flax.core.DenyList('_overwrite_with_gradient')."
)
