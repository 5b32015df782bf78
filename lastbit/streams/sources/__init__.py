"""Where streams come from: what `run_ordered` reads, and who is told of what was handled. Any iterable of (offset,
record) will do; these are brokers. Each module says what its order is worth.

    rabbitmq        RabbitQueue (classic, quorum), RabbitStream
    redis_streams   RedisStream
    kafka           KafkaTopics, through confluent-kafka or kafka-python
"""
