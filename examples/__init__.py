"""Three real cases, and the demo that shows them with one worker.

``reset_mail``: mails that a server refuses for a while are tried again, one that it will never take is set aside.
``order_timeout``: an unpaid order cancels itself; paying takes the timeout back.
``alarm``: an alarm that rings unless it is resolved, its deadline moved earlier and later.

Each runs on its own (``python -m examples.reset_mail``), all of them with ``make demo``. In each, ``tasks.py`` and the
modules beside it are what a program of yours could look like; ``story.py`` acts its users, and checks what it sees.

``foreign_producer``: a shell script and a PHP script that put jobs into beanstalkd without multiq.
"""
