"""What users are told of histories that a loop leaves out, trains or cannot change."""

TRAINED = (
    "A loss is differentiated with respect to the 'fp8' collection: an optimizer that takes all "
    "variables trains amax histories like weights, and nothing records an amax. Use "
    "jfp8.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx) with "
    "jfp8.value_and_grad; in a loop of another trainer, the collection whose gradient replaces it: "
    "jfp8.convert(model, recipe, state_collection='_overwrite_with_gradient')."
)
NOT_MUTABLE_INSIDE = (
    "An FP8 matmul records no amax: the 'fp8' collection is mutable in this apply, but not inside "
    "the transformation that calls it. Name it there, nn.while_loop(..., carry_variables='fp8') "
    "(True for a converted model); or train with jfp8.TrainState and jfp8.value_and_grad."
)
WITHOUT_HISTORIES = (
    "A model with delayed scaling is trained without its 'fp8' collection, so that every scale "
    "comes from the tensor itself: current scaling. Pass all that model.init returned, as "
    "jfp8.TrainState and jfp8.value_and_grad do, or ask for what you get: recipe='current'."
)
UNCHANGED = (  # a warning where the collection is mutable
    "apply returns the collection '_overwrite_with_gradient' as it was: its gradient is its next "
    "value. A loop that keeps what apply returns, such as Kauldron's, records no amax: leave out "
    "state_collection there. In others, mutable=flax.core.DenyList('_overwrite_with_gradient')."
)
