"""A model without a table. The admin's list of apps and the permissions need a model."""

from __future__ import annotations

from typing import Any

from django.db import models


class _NoRows(models.Manager):
    """Finds no rows, and makes no query. ``manage.py dumpdata`` reads all models, including models that have no
    table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class FailedJob(models.Model):
    """A failed job. Its permissions are *view*, *change* (retry) and *delete* (forget)."""

    id = models.CharField(primary_key=True, max_length=200)
    objects = _NoRows()

    class Meta:
        """There is no table, so ``migrate`` only makes the permissions."""

        app_label = "multiq"
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view", "change", "delete")
        verbose_name = "failed job"
        verbose_name_plural = "failed jobs"

    def __str__(self) -> str:
        return str(self.id)
