"""Password-reset mails over SMTP: retried while the server says "later", set aside when it says "no"."""
