from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = (
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("batch", models.BigIntegerField(unique=True)),
                ("parcels", models.JSONField()),
            ],
        ),
        migrations.CreateModel(
            "Charge",
            [
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("parcel", models.CharField(max_length=200)),
                ("order", models.ForeignKey("django_shop.order", models.CASCADE)),
            ],
        ),
    )
