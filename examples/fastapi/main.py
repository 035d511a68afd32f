# main.py
from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException
from multiq.contrib.fastapi import exception_handlers, lifespan, status_router

from shop import jobs, send_receipt

web = FastAPI(lifespan=lifespan(jobs), exception_handlers=exception_handlers)
owners: dict[str, str] = {}  # in your own program, a table


def user(x_user: Annotated[str, Header()]) -> str:  # in your own program, your authentication
    return x_user


User = Annotated[str, Depends(user)]


@web.post("/orders/{order}", status_code=202)
async def place_order(order: int, user: User) -> dict[str, str]:
    handle = await send_receipt.aenqueue(order)
    owners[handle.ref] = user
    return {"job": handle.ref}


def may_see(ref: str, user: User) -> None:
    if owners.get(ref) != user:
        raise HTTPException(404)


web.include_router(status_router(dependencies=[Depends(may_see)]), prefix="/jobs")
