"""What a call is called in messages."""

__all__ = ["doing"]

_WORDS = {
    "begin": "begin a phase",
    "begin_update": "stop generating for new weights",
    "build": "build what it shall hold",
    "close_shipment": "end the hand-over of weights",
    "describe": "tell what it holds",
    "describe_trainer": "tell what it holds",
    "generate": "generate",
    "load": "load a checkpoint",
    "load_parcel": "load weights",
    "load_pretrained": "load pretrained weights",
    "log_probs": "compute log-probs",
    "next_parcel": "send weights",
    "open_shipment": "send weights",
    "park": "park process groups",
    "publish": "take on a version",
    "revive": "revive process groups",
    "sleep": "sleep",
    "take_parcel": "send weights",
    "take_snapshot": "take a snapshot",
    "update": "do a step",
    "wake_up": "wake up",
    "weight_checksums": "compute checksums of weights",
}


def doing(method: str) -> str:
    """After "did not": of a service's method, `wake up` say; unknown ones are named."""
    return _WORDS.get(method, f"answer {method!r}")
