# shop/views.py
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from multiq.contrib.django import TaskResultDoesNotExist

from shop.models import Order
from shop.tasks import send_receipt


@csrf_exempt  # because curl has no token
@transaction.atomic
def place_order(request: HttpRequest, item: str) -> JsonResponse:
    order = Order.objects.create(item=item)
    result = send_receipt.enqueue(order.pk)  # the job exists if and only if the order is committed
    return JsonResponse({"job": result.id}, status=202)


def receipt(request: HttpRequest, job: str) -> JsonResponse:
    try:
        result = send_receipt.get_result(job)
    except TaskResultDoesNotExist:
        return JsonResponse({"detail": "no such receipt"}, status=404)
    return JsonResponse({"status": result.status, "sent": result.return_value if result.is_finished else None})
