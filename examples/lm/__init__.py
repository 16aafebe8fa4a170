"""The modules of the scripts that train language models, in reading order:

corpus, model (nnx_model, plain_gpt, moe_model), training, options, report (expert_load); checkpoint
and sharding.
"""
