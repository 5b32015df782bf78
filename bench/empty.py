"""The peer of single acks: an endpoint of the same form that does nothing."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel


class Acks(BaseModel):
    items: list[str]


class Answer(BaseModel):
    applied: int
    repeated: int
    completed: list[dict[str, str]]
    rejected: list[dict[str, str]]


def create() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/acks")
    async def acks(body: Acks) -> Answer:
        return Answer(applied=len(body.items), repeated=0, completed=[], rejected=[])

    return app
