# shop.py
import multiq

jobs = multiq.App()  # MULTIQ_URL, or multiq.db in the current folder


@jobs.task(queue="mail", keep=3600)
def send_receipt(order: int) -> str:
    job = multiq.current_job()
    job.progress(0.5, "the receipt is printed")
    return f"receipt {order} is sent"
