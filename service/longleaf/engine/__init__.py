"""The SGLang plugin: algorithm DDTREE, attention backend longleaf_mla, and the guard around them.

Nothing here is imported but by ``longleaf engine`` and by SGLang's plugin loader: the modules
need torch and sglang, which the rest of the service does without.
"""
