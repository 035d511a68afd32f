"""What tasks write."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order, or a note of a task."""

    number = models.IntegerField()
    note = models.CharField(max_length=200, default="")

    class Meta:
        """Without migrations: ``migrate --run-syncdb`` makes the table."""

        app_label = "django_shop"

    def __str__(self) -> str:
        return f"{self.number} {self.note}"
