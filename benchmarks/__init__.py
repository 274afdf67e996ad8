"""Scripts behind the published figures, which only the authors run: `python -m benchmarks.NAME --help`.

overhead        sample() against its bare forward passes
peer            DiffusionGemma against transformers, on the same checkpoint
prompt          prefill of long prompts: time and memory
repair          which rules correct a wrong token
cache           KV cache reuse in a bidirectional model, against no cache
quantise        weights and KV cache in few bits: what that costs in quality
objectives      kinds of noise at equal tokens: bits per byte of books
rewards         accuracy and passes before and after GRPO or distillation
search          sequential Monte Carlo against best-of-n at equal passes
effort          what a reasoning effort changes: accuracy, forward passes, tokens
pipeline        batches from shards: tokens per second, start and resume, memory
training        the training loop against one written by hand
serving         a server under load: latencies, batching, agents
grammar_models  constrained answers under published schemas: how many are invalid
grammar_cost    the share of a denoising step that grammars take on the host
decisions       the probabilities of typed decisions, and decisions a second of a server
predicted       a text of 200 lines rewritten with one change, from a prediction
structure       counts of files, functions and documentation of the package
"""
