"""Sources for `run_ordered` that read from brokers, and commit to them. Any other iterable of (offset, record) pairs
can be a source too. Each module's docstring describes the order that its broker guarantees.

    rabbitmq        RabbitQueue (classic, quorum), RabbitStream
    redis_streams   RedisStream
    kafka           KafkaTopics, through confluent-kafka or kafka-python
"""
