"""A shop on FastAPI, SQLAlchemy and SQS that charges each parcel exactly once, with no service of Lastbit.

The API commits an order and its batch in one transaction, then sends a message for each parcel. A consumer inserts the
charge and acks the item in one transaction. With PostgreSQL and an AWS account, or moto's server as in
`examples/adapters/sqs.py`:

    export DATABASE_URL=postgresql+psycopg://app@127.0.0.1/app
    uvicorn examples.fastapi_shop.api:app
    python -m examples.fastapi_shop.consumer     # in another terminal, with the same variables; any number of them
    curl 127.0.0.1:8000/orders --json '["book", "lamp"]'
    curl 127.0.0.1:8000/orders/1
    curl 127.0.0.1:8000/orders/1/send -X POST    # sends what is pending again: as often as you like

    database.py    the tables, the engine, and Lastbit on it
    messages.py    the queue
    api.py         orders
    consumer.py    the effect of a message
"""
