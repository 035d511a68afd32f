"""The model of failed jobs. The model has no table, so this migration changes only the permissions."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="FailedJob",
            fields=[("id", models.CharField(max_length=200, primary_key=True, serialize=False))],
            options={
                "verbose_name": "failed job",
                "verbose_name_plural": "failed jobs",
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": ("view", "change", "delete"),
            },
        )
    ]
