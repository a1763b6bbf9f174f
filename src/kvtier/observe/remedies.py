"""What to do about a cause of computed tokens: one text for each cause, and for each reason of ``not_stored``."""

from kvtier.misses import MORE_FIELDS, NO_KEY_REASON, UNKNOWN_TENANT_REASON, Miss, MissCause, NotStored

REMEDIES: dict[MissCause, str] = {
    MissCause.NEVER_SEEN: (
        "No request of this engine has named these blocks before, and no tier has them. New prompts cannot hit. For "
        "prompts that should be known compare their first tokens. If an earlier engine has computed them, its log and "
        "its last drain say how many blocks were lost before a tier had them."
    ),
    MissCause.EVICTED: (
        "They were held and left before they came back. Give the tier more room, put a larger one behind it, or use "
        "the policy that the simulator finds best: kvtier simulate TRACE --policy lru,hazard."
    ),
    MissCause.NOT_STORED: "They were computed here and not kept.",
    MissCause.OTHER_NAMESPACE: (
        "Another namespace of the same place holds these very blocks. Start the engine with the same values as before, "
        "or accept that what was stored with the old ones is not used."
    ),
    MissCause.EXPIRED: "Their time to live had ended. Raise ttl_s of the tier if they are still worth keeping.",
    MissCause.PURGED: (
        "Another program deleted them, or the engine was reset. Nothing to do if that was wanted; if not look for a "
        "job that empties the tier's directory."
    ),
    MissCause.IN_FLIGHT: (
        "Another request was still writing them when this one could wait no longer. Raise lookup_deadline_s if "
        "loading is worth the wait."
    ),
    MissCause.LATE: (
        "The tier did not deliver before lookup_deadline_s. Use a faster tier or more threads, raise the deadline, or "
        'set "load_if": "faster", which waits only where waiting pays.'
    ),
    MissCause.TIER_DOWN: (
        "A tier that might hold them was left out. The log names its failure: make it reachable again. A tier that is "
        "indexing needs only time."
    ),
    MissCause.DAMAGED: (
        "Their checksum was wrong, so they were deleted and computed. Check the disk or the memory behind the tier: "
        "kvtier verify PLACE."
    ),
    MissCause.LOAD_FAILED: (
        "They were found and could not be loaded. The log names the error of the tier or of the copy."
    ),
    MissCause.GROUP_SHORT: (
        "One KV group holds less than the others, and a prefix needs all of them. Its blocks leave first or are not "
        "stored: give host memory more room, or compare block sizes of the groups."
    ),
    MissCause.NO_ROOM: (
        "Host memory could not take what the tier holds, because everything in it was in use. Raise cpu_bytes_to_use."
    ),
    MissCause.LIMITED: (
        "The request itself keeps them from loading: skip_load, max_load_tokens, prompt_logprobs, a resumable session, "
        "or the engine did not load what was found. Send such requests without it if hits matter."
    ),
    MissCause.SLOWER: (
        "Computing them was faster than loading them from this tier, so all is as it should be. A faster tier would "
        "bring hits."
    ),
    MissCause.AUDITED: (
        "The request was computed on purpose, to compare it with what is stored (audit_ratio). With the reason "
        '"loads stopped" too many blocks were wrong, and nothing is loaded: the log names them. When the cause is '
        "gone, restart or run kvtier audit --resume."
    ),
    MissCause.PARTIAL_BLOCK: (
        "Less than a block is left, or the last token, which every engine computes. A smaller block_size leaves less; "
        "nothing else helps."
    ),
}
"""What to do, in plain words."""

NOT_STORED_REMEDIES: dict[NotStored, str] = {
    NotStored.SKIP_STORE: "A request with skip_store computed them: leave the hint out for prompts that come again.",
    NotStored.MAX_STORE_TOKENS: "They lie behind a request's max_store_tokens: raise it or leave it out.",
    NotStored.PROMPT_ONLY: (
        "They are of an answer, and offload_prompt_only keeps prompts alone: switch it off if the next turn sends "
        "answers back."
    ),
    NotStored.REUSE_FILTER: (
        "store_threshold keeps a block only from its second or later request on, so every first return is a miss: set "
        "it to 0 unless writes are what you save."
    ),
    NotStored.ADMISSION: (
        "The admission found them too unlikely to come back: lower min_reuse_probability, or leave admission out."
    ),
    NotStored.NO_ROOM: (
        "There was no room when they were to be stored: the disk is full, or everything in host memory was in use. "
        "Free or add space."
    ),
    NotStored.DECLINED: (
        "They left host memory before the tier could take them: raise cpu_bytes_to_use or max_in_flight_store_bytes, "
        'use a faster tier, or set its cascade to "must_write", which keeps them until the tier has them.'
    ),
    NotStored.JOB_FAILED: "Writing them failed: the log names the error of the tier or of the copy.",
}
"""What to do about blocks that were not kept, by reason."""

FORGETFUL_REMEDY = (
    "No tier has these blocks, and no request of the last {known_s:,.0f} s has named them; what came before is not "
    "known. New prompts cannot hit. For prompts that should be known compare their first tokens."
)
"""What to do about blocks that are new as far back as an engine remembers."""

UNKNOWN_TENANT_REMEDY = (
    'The request names no tenant that the setting tenants lists: add its name, or "*" for all others.'
)

NO_KEY_REMEDY = (
    "The ring of the encrypted tier has no key for the tenant: its key was dropped, or it never had one. "
    "kvtier keys list shows the ring, kvtier keys rotate --tenant gives it a key."
)

FIELD_REMEDIES = (
    ("epoch", "A reset began a new epoch: blocks from before it are never used again."),
    ("tenant", "Tenants do not share blocks: give engines that may share the same tenant_salt."),
    ("hash_seed", "Hashes of blocks differ: set PYTHONHASHSEED to the same number for every engine."),
    ("rope", "Keys were rotated in another way: use the same RoPE settings."),
    ("dtype", "Bytes have another type: start with the same dtype."),
    ("kv_layout", "Rows have another layout: start with the same attention backend."),
    ("attn", "Attention computes other bytes: start with the same implementation."),
    ("revision", "The weights are others: blocks of the old ones are rightly not used."),
    ("model.weights", "The weights are others: blocks of the old ones are rightly not used."),
    ("adapter", "Another adapter is loaded: its blocks are its own."),
    ("block_size", "Blocks have another size: use the same block_size."),
    ("parallel", "Rows of another number of workers have another layout: use the same parallelism."),
)
"""What to do about a field of the identity that differs: a part of its name -> the remedy."""


OTHER_LAYOUT_REMEDY = (
    "Another version of kvtier stored these blocks in a layout that this one does not read: each prompt is computed "
    "once more. Nothing to do: such blocks leave as room is needed; to remove older ones now: "
    "kvtier purge PLACE --older-layouts."
)
"""What to do about blocks from before an upgrade."""


def remedy_of(miss: Miss) -> str:
    """Return what to do about a cause. Pure."""
    if miss.cause is MissCause.NOT_STORED and "reason" in miss.detail:
        return NOT_STORED_REMEDIES[NotStored(miss.detail["reason"])]
    if miss.cause is MissCause.NEVER_SEEN and "known_s" in miss.detail:
        return FORGETFUL_REMEDY.format(known_s=float(miss.detail["known_s"]))
    if miss.cause is MissCause.LIMITED and miss.detail.get("reason") == UNKNOWN_TENANT_REASON:
        return UNKNOWN_TENANT_REMEDY
    if miss.cause is MissCause.LIMITED and miss.detail.get("reason") == NO_KEY_REASON:
        return NO_KEY_REMEDY
    if miss.cause is MissCause.OTHER_NAMESPACE:
        fields = list_fields(miss)
        if "layout_version" in fields:
            return OTHER_LAYOUT_REMEDY
        if any("dtype" in field for field in fields):
            # Other bytes have another digest, whatever weights they are of.
            fields = [field for field in fields if field != "model.weights"]
        named = [text for part, text in FIELD_REMEDIES if any(part in field for field in fields)]
        return " ".join([*named, REMEDIES[miss.cause]])
    return REMEDIES[miss.cause]


def list_fields(miss: Miss) -> list[str]:
    """Return the fields of the identity in which a sibling namespace differs. Pure."""
    return [name for name in miss.detail if name not in ("namespace", MORE_FIELDS, "ago_s")]
