"""What flash_attn has and flashsci does not is refused by the argument's name, never ignored."""

from __future__ import annotations

from typing import Any

_ADVICE = {
    "alibi_slopes": "build the bias and call flashsci.attention(bias=..., return_lse=True)",
    "attention_chunk": "give a mask to flashsci.attention, or pack the chunks as sequences of their own",
    "block_table": "paged caches are not served; gather the pages into a dense cache [B, S, Hk, D]",
    "page_table": "paged caches are not served; gather the pages into a dense cache [B, S, Hk, D]",
    "cu_seqlens_q": "queries beside a cache must be dense [B, Sq, Hq, D]",
    "cu_seqlens_k_new": "new keys beside a cache must be dense [B, Snew, Hk, D]",
    "max_seqlen_q": "queries beside a cache must be dense [B, Sq, Hq, D]",
    "q_descale": "8-bit tensors are not served; multiply by the scale in bfloat16 first",
    "k_descale": "8-bit tensors are not served; multiply by the scale in bfloat16 first",
    "v_descale": "8-bit tensors are not served; multiply by the scale in bfloat16 first",
    "qv": "concatenate q with qv and k with v along the head dim",
    "rotary_seqlens": "positions are those of the cache; rotate q and k before the call for others",
    "leftpad_k": "begin the sequence in cu_seqlens_k where its keys begin",
    "scheduler_metadata": "flashsci plans by itself; leave it out",
    "seqused_k": "end the sequence in cu_seqlens_k where its keys end",
    "seqused_q": "remove the unused rows of q (bert_padding.unpad_input)",
    "zero_tensors": "every row of a sequence is written; leave it False",
}  # fmt: skip


def refuse(function: str, **given: Any) -> None:
    """Raise for arguments that are not None (nor a 0 that asks for nothing).

    Raises:
        NotImplementedError: names the argument and what to do instead.
    """
    for name, value in given.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise NotImplementedError(
                f"flashsci's stand-in for {function} does not take {name}: {_ADVICE[name]}"
            )
