"""Measurements that users run: `mercury bench decode | compile | gpu | serve | train`.

decode, recommend                       accuracy and speed of decoding rules
compile, hlo                            programs for chips that are not here; chips, abstract_params describe these
serve, serve_load                       a server under load; serve_process starts one
train                                   the training loop against one written by hand
gpu/                                    kernels and models on the accelerator that is here
timing                                  what all of them time with
"""
