"""The parts of the scripts that train language models, in reading order:

corpus, model (nnx_model, plain_gpt), training, options, report; checkpoint and sharding.
"""
