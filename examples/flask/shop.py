# shop.py
import multiq
from flask import Flask, request
from multiq.contrib.flask import Multiq

queue = Multiq()
owners: dict[str, str | None] = {}  # in your own program, a table


@queue.task(queue="mail", keep=3600)
def send_receipt(order: int) -> str:
    multiq.current_job().progress(0.5, "the receipt is printed")
    return f"receipt {order} is sent"


def may_see(handle: multiq.JobHandle) -> bool:
    return owners.get(handle.ref) == request.headers.get("X-User")  # in your own program, your authentication


def create_app(**config: object) -> Flask:
    web = Flask(__name__)
    web.config.from_prefixed_env()
    web.config.update(config)
    queue.init_app(web)
    web.register_blueprint(queue.status_blueprint(may=may_see), url_prefix="/jobs")

    @web.post("/orders/<int:order>")
    def place_order(order: int) -> tuple[dict[str, str], int]:
        handle = send_receipt.enqueue(order)
        owners[handle.ref] = request.headers.get("X-User")
        return {"job": handle.ref}, 202

    return web
