"""The checker behind `--jaxtyping`: beartype, taking an int where a float is asked for, as PEP 484 does."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
