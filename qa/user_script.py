# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""Wrong calls that the type checker reports in a user's script.

Checked by `make types`, never run: each wrong line ignores the error that it must cause, and an ignored error that
no longer occurs is itself an error.
"""

import mercury_jax as mj

lm = mj.load()

mj.sample(lm, "x", max_tokens=4)
mj.sample(lm, "x", max_tokens="4")  # pyright: ignore[reportArgumentType]
mj.sample(lm, "x", tokens=4)  # pyright: ignore[reportCallIssue]
mj.sample("nano", "x")  # pyright: ignore[reportArgumentType]

mj.edit(lm, "x", spans=[(0, 1)])
mj.edit(lm, "x", spans=5)  # pyright: ignore[reportArgumentType]
mj.edit(lm, 5)  # pyright: ignore[reportArgumentType]

mj.sample(lm, "x", sampler=mj.rules.threshold(0.9))
mj.rules.threshold("0.9")  # pyright: ignore[reportArgumentType]
mj.rules.threshold(q=0.9)  # pyright: ignore[reportCallIssue]
mj.rules.threshold(0.9, 0.8, 0.7)  # pyright: ignore[reportCallIssue]
mj.processors.top_k("3")  # pyright: ignore[reportArgumentType]

out = mj.sample(lm, "x")
print(out.text.upper(), out.forwards + 1)
print(out.forward)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
