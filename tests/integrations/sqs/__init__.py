"""Tests of lastbit.integrations.sqs, with boto3 on moto's server."""
