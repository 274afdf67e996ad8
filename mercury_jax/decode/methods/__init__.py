"""Decoding methods beside the plain one. A file has one: its idea, its source, its step, its slot of the state.

Three files are of another kind: `causal` has what four methods share, `guidance` makes a model of a model, and
`cache_refresh` has the policies of `key_reuse`.

`state.Method` is their interface; `build_config.choose_method` chooses one for a call. The core of the decoder
imports none of them.
"""
