"""Decoding methods beside the plain one. Each file has one: its idea, its source, its step, its slot of the state.

`state.Method` is their interface; `build_config.choose_method` chooses one for a call. The core of the decoder
imports none of them.
"""
