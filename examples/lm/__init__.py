"""What the scripts that train language models are made of, in reading order:

corpus, model (nnx_model, plain_gpt), training, options, report; checkpoint and sharding.
"""
