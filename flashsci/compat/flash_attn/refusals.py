"""The refusal of arguments that flash_attn has and flashsci does not: by name, never ignored."""

from __future__ import annotations

from typing import Any

_ADVICE = {
    "alibi_slopes": "build the bias and call flashsci.attention(bias=..., return_lse=True)",
    "attention_chunk": "give a mask to flashsci.attention, or pack the chunks as sequences of their own",
    "dropout_p": "gather the pages (k[block_table]) and call it without a block_table",
    "q_descale": "8-bit queries are served without a cache and without seqused; multiply by the scale in bfloat16 first",
    "k_descale": "8-bit tensors are served without seqused; multiply by the scale in bfloat16 first",
    "v_descale": "8-bit tensors are served without seqused; multiply by the scale in bfloat16 first",
    "qv": "concatenate q with qv and k with v along the head dim",
    "leftpad_k": "name the pages of the keys in use alone in block_table",
    "zero_tensors": "every row of a sequence is written; leave it False",
}


def refuse(function: str, **given: Any) -> None:
    """Raise for arguments that are not None (or a 0 that has no effect).

    Raises:
        NotImplementedError: names the argument and the alternative.
    """
    for name, value in given.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"flashsci's stand-in for {function} does not take {name}: {_ADVICE[name]}")
