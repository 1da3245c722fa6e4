"""The request bodies of OpenAI's API that the server supports."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tokenmix_core.serving.sampling import MOST_LOGPROBS

# options of the API that are accepted and ignored: in this server they do not change an answer
_IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
# options of the API for which only these values are accepted, which change nothing; other values are an error
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class Request(BaseModel):
    """Options that completions and chat completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    mode: str | list[tuple[int, str]] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _refuse_options(self) -> Request:
        for name, value in (self.model_extra or {}).items():
            if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
                raise ValueError(
                    f"the option {name} is not available" if name in _NEUTRAL else f"unknown option {name}"
                )
        if any(not x for x in self.stops):
            raise ValueError("stop must not contain empty strings")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Request):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, even if the body has a single one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChatRequest(Request):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
