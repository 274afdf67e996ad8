"""Benchmarks that users run: `mercury bench decode | compile | gpu | serve | train`.

decode, recommend     accuracy and speed of decoding rules
compile, hlo          programs compiled ahead of time for other chips; chips and abstract_params describe chip and model
serve, serve_load     a server under load; serve_process starts one
plan                  models x chips as a table, from `compile`
train                 the training loop compared with one written by hand
gpu/                  kernels and models on the local accelerator
timing                timing functions that all of them use
"""
