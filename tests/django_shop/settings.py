"""Settings, of which a test names the databases and the task backends in the environment, as JSON."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import Any

SECRET_KEY = "only for tests"  # noqa: S105
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "django_shop.urls"
LOGGING_CONFIG = None
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "multiq.contrib.django",
    "django_shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

DATABASES: dict[str, Any] = json.loads(os.environ.get("DJANGO_SHOP_DATABASES", "{}"))
TASKS: dict[str, Any] = json.loads(
    os.environ.get("DJANGO_SHOP_TASKS")
    or '{"default": {"BACKEND": "multiq.contrib.django.TaskBackend", "QUEUES": [], "OPTIONS": {"url": "memory://"}}}'
)
if "DJANGO_SHOP_MULTIQ" in os.environ:
    MULTIQ = json.loads(os.environ["DJANGO_SHOP_MULTIQ"])

if find_spec("MySQLdb") is None and any("mysql" in database["ENGINE"] for database in DATABASES.values()):
    import pymysql

    pymysql.install_as_MySQLdb()
