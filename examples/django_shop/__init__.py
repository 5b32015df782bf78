"""A shop on Django, Celery and PostgreSQL that charges each parcel exactly once, with no service of Lastbit.

An order and its batch are committed in one `transaction.atomic`; then a task is sent for each parcel. The task inserts
the charge and acks its item in one transaction. Start PostgreSQL and Redis, then:

    export DJANGO_SETTINGS_MODULE=examples.django_shop.settings
    export DATABASE_URL=postgresql://app@127.0.0.1/app REDIS_URL=redis://127.0.0.1:6379
    django-admin migrate
    celery -A examples.django_shop.tasks worker
    django-admin place_order book lamp chair     # in another terminal, with the same variables
    django-admin send_parcels 1                  # sends what is pending again: as often as you like

Without DATABASE_URL, the database is the file shop.db.

    settings.py    the database, and the one app
    models.py      orders and charges
    tasks.py       the app of Celery, Lastbit, and the task with its effect
    orders.py      places an order, and sends its messages
    management/    the commands
    migrations/    the tables: Django's own, and in a second step Lastbit's
"""
