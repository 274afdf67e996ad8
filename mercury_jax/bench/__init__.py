"""Benchmarks that users run: `mercury bench decode | compile | gpu`.

decode, recommend     accuracy and speed of decoding rules
compile, hlo          programs compiled ahead of time for other chips; chips and abstract_params describe chip and model
plan                  models x chips as a table, from `compile`
gpu/                  kernels and models on the local accelerator
timing                timing functions that all of them use
"""
